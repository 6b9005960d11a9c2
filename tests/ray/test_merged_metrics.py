"""The metrics of several replicas on one page."""

from nanovllm.apps.server.prometheus import merge

PAGE = """# HELP tokens_total Tokens.
# TYPE tokens_total counter
tokens_total{engine="0"} 5.0
# HELP seconds Seconds.
# TYPE seconds histogram
seconds_bucket{le="1"} 2.0
seconds_bucket{le="+Inf"} 3.0
seconds_count 3.0
seconds_sum 4.5
"""


def test_every_sample_names_its_replica() -> None:
    page = merge({"b": PAGE, "a": PAGE.replace("5.0", "7.0")}, "replica").decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert lines[:2] == [
        'tokens_total{engine="0",replica="a"} 7.0',
        'tokens_total{engine="0",replica="b"} 5.0',
    ]
    assert 'seconds_bucket{le="+Inf",replica="b"} 3.0' in lines
    assert len(lines) == 10
    assert page.count("# TYPE tokens_total counter") == page.count("# TYPE seconds histogram") == 1


def test_no_replica_gives_an_empty_page() -> None:
    assert merge({}, "replica") == b""
