from quant.errors import QuantError


def test_an_error_prints_the_problem_and_then_the_remedy():
    error = QuantError("model-1.safetensors is missing", "Download it again")

    assert str(error) == "model-1.safetensors is missing. Download it again"
    assert (error.problem, error.remedy) == ("model-1.safetensors is missing", "Download it again")
