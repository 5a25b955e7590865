from importlib.util import find_spec

import pytest
import torch
from torch.nn.utils import rnn

torch.set_num_threads(1)  # pytest-xdist already uses every core

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # machines that only run the tests marked gpu need no hypothesis
    pass
else:
    fixtures = [HealthCheck.function_scoped_fixture]  # `everywhere` holds for all examples
    settings.register_profile("mslmn", deadline=None, derandomize=True, max_examples=60, suppress_health_check=fixtures)
    settings.load_profile("mslmn")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


NEEDS = {  # bare machines, which only run the tests marked gpu, lack these: files without such a test are left out
    "soundfile": ["test_assets.py", "test_cli.py", "test_experiments.py", "test_search.py", "test_words.py"],
    "hypothesis": ["test_timit.py"],
    "HersheyFonts": ["test_report.py", "test_writer.py"],
}
collect_ignore = [file for package, files in NEEDS.items() if find_spec(package) is None for file in files]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def everywhere(request, monkeypatch):
    """The test runs on each device: what it makes without naming one lies there."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    keep_lengths_here(monkeypatch)
    with torch.device(request.param):
        yield request.param


def keep_lengths_here(monkeypatch):
    """`pack_sequence` makes its lengths where everything is made, and then wants them on the CPU."""
    pack = rnn.pack_padded_sequence
    monkeypatch.setattr(
        rnn,
        "pack_padded_sequence",
        lambda input, lengths, *rest, **options: pack(input, lengths.cpu(), *rest, **options),
    )
