import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist already uses every core

try:
    from hypothesis import settings
except ImportError:  # machines that only run the tests marked gpu need no hypothesis
    pass
else:
    settings.register_profile("mslmn", deadline=None, derandomize=True, max_examples=60)
    settings.load_profile("mslmn")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return request.param
