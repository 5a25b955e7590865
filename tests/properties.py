"""hypothesis; on a machine without it (bare GPU machines), tests of properties are skipped and the others run."""

import pytest

try:
    from hypothesis import assume, given
    from hypothesis import strategies as st
except ImportError:
    from unittest.mock import MagicMock

    assume, st = MagicMock(), MagicMock()

    def given(*args, **kwargs):
        def skipped(test):
            @pytest.mark.skip(reason="no hypothesis here")
            def property_test():
                """Without the arguments that hypothesis would give."""

            property_test.__name__ = test.__name__
            return property_test

        return skipped


__all__ = ["assume", "given", "st"]
