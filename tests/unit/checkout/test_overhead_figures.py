"""What `benchmarks.overhead` prints where a figure is the difference of two runs."""

from benchmarks.overhead.overhead_report import Report
from benchmarks.overhead.overhead_runners import Sample


def _sample(side: str, rollouts: int, wall: float, cpu: float, start: float = 0.0) -> Sample:
    return Sample(
        side=side,
        rollouts=rollouts,
        right=rollouts,
        start_wall=start,
        start_cpu=start,
        wall=wall,
        cpu=cpu,
        grading_wall=0.0,
        grading_cpu=0.0,
        endpoint_cpu=0.0,
        window=1.0,
        calls=4 * rollouts,
    )


OURS = _sample("Perdure, bash", 50, wall=10.0, cpu=10.0, start=5.0)


def test_a_peers_start_is_subtracted() -> None:
    peer = [_sample("Harbor", 1, wall=2.0, cpu=1.0), _sample("Harbor", 50, wall=12.0, cpu=11.0)]
    text = Report([OURS, *peer], []).text()

    assert "| Harbor | 50 | 50 | 12.0 | **300** | 250 | **0.200** | 0.220 |" in text
    assert "to Harbor: 1.00x the rate" in text


def test_no_ratio_comes_from_a_run_of_one_that_took_longer() -> None:
    """Its modules were read from a cold disk: what is left says nothing of a rollout."""
    peer = [_sample("Harbor", 1, wall=13.0, cpu=12.0), _sample("Harbor", 50, wall=12.0, cpu=11.0)]
    text = Report([OURS, *peer], []).text()

    assert "| Harbor | 50 | 50 | 12.0 | **?** | 250 | **?** | 0.220 |" in text
    assert "to Harbor: ?x the rate (0.80x with both starts), ?x the CPU" in text
