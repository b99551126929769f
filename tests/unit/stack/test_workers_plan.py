"""Which nodes of a Ray cluster get a worker, and what its autoscaler is asked for."""

from typing import Any

import pytest
from click.testing import CliRunner

from perdure.cli.commands.workers import workers
from perdure.stack.ray_workers.node_plan import WorkersPlan

NODE: dict[str, Any] = {
    "Alive": True,
    "NodeID": "0123456789f",
    "NodeName": "n",
    "Resources": {"CPU": 8.0, "w": 1.0},
    "Labels": {"kind": "spot"},
}


def plan(**fields: Any) -> WorkersPlan:
    return WorkersPlan(environment={"A": "b"}, home="/h/{node}/{id}", **fields)


def test_a_node_has_a_seat_for_each_share_of_its_cpus_and_a_home_of_its_own() -> None:
    chosen = plan(spare_cpus=2, cpus_per_rollout=0.3)
    found = chosen.variables(NODE, chosen.seats(NODE, 0))

    assert found == {"A": "b", "PERDURE_HOME": "/h/n/3456789f", "PERDURE_SLOTS__AGENT": "20"}


@pytest.mark.parametrize(("spare", "held", "seats"), [(0, 1, 7), (2, 1, 6), (1, 3, 5), (0, 8, 0)])
def test_engines_keep_the_cpus_that_they_hold(spare: float, held: float, seats: int) -> None:
    """`--spare-cpus` is the least that workers leave; what placement groups hold counts towards it."""
    chosen = plan(spare_cpus=spare)

    assert chosen.seats(NODE, held) == seats
    assert f"hold {held:g}" in chosen.no_seat(NODE, held)


@pytest.mark.parametrize(
    "other",
    [
        {"Alive": False},
        {"Labels": {}},
        {"Labels": {"kind": "x"}},
        {"Resources": {"CPU": 8.0}},
        {"Resources": {"w": 1.0}},
    ],
)
def test_other_nodes_get_no_worker(other: dict[str, Any]) -> None:
    chosen = plan(spare_cpus=2, resource="w", labels={"kind": "spot"})

    assert chosen.fits(NODE)
    assert not chosen.fits({**NODE, **other})


@pytest.mark.parametrize(
    ("selector", "passing"),
    [
        ("spot", {"spot"}),
        ("!spot", {"reserved", None}),
        ("in(spot, reserved)", {"spot", "reserved"}),
        ("!in(spot,reserved)", {None}),
    ],
)
def test_labels_select_nodes_as_rays_selectors_do(selector: str, passing: set[str | None]) -> None:
    chosen = plan(labels={"kind": selector})
    labels = {kind: {"kind": kind} if kind else {} for kind in ("spot", "reserved", None)}

    assert {k for k, found in labels.items() if chosen.fits({**NODE, "Labels": found})} == passing


@pytest.mark.parametrize("wrong", ["kind", "kind=", "kind=in()", "kind=a b", "=spot", "kind=!!a"])
def test_a_label_that_ray_would_not_understand_is_refused_with_what_to_write(wrong: str) -> None:
    told = CliRunner().invoke(workers, ["up", "--ray", "--label", wrong])

    assert told.exit_code == 2
    assert "write KEY=VALUE, KEY=!VALUE, KEY=in(A,B) or KEY=!in(A,B)" in told.output


@pytest.mark.parametrize(("rollouts", "asked"), [(0, 1), (3, 3), (99, 10)])
def test_the_autoscaler_is_asked_for_every_rollout_up_to_the_most(
    rollouts: int, asked: int
) -> None:
    share = {"CPU": 0.5, "w": 0.001}
    chosen = plan(spare_cpus=2, cpus_per_rollout=0.5, resource="w", most_rollouts=10)

    spare = [{"CPU": 2.0, "w": 0.001}] * 2
    assert chosen.bundles(2, rollouts, seats=0) == [share] * asked + spare


@pytest.mark.parametrize(("seats", "asked"), [(2, 3), (3, 0), (9, 0)])
def test_what_fits_where_workers_are_keeps_no_other_node(seats: int, asked: int) -> None:
    """Ray may meet a request with a node that was given back, and then keeps that node."""
    assert len(plan(most_rollouts=10).bundles(2, 3, seats=seats)) == asked
