import pytest
import torch

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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def everywhere(request):
    """The test runs on each device: what it makes without naming one lies there."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    with torch.device(request.param):
        yield request.param
