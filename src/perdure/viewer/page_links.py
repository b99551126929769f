"""URLs of pages. They follow store keys, so users can keep and send them."""

from urllib.parse import quote, urlencode


def run(run_id: str, **parameters: object) -> str:
    return _with(f"/runs/{quote(run_id, safe='')}", parameters)


def group(run_id: str, instance_id: str) -> str:
    return f"{run(run_id)}/rollouts/{quote(instance_id, safe='')}"


def rollout(
    run_id: str, instance_id: str, sample: int, part: str = "", **parameters: object
) -> str:
    """The page of a rollout. `part`: tokens, patch, tests, files; empty for the trajectory."""
    path = f"{group(run_id, instance_id)}/{sample}"
    return _with(f"{path}/{part}" if part else path, parameters)


def turn(run_id: str, instance_id: str, sample: int, index: int, attempt: int | None = None) -> str:
    """The page that contains the turn, scrolled to it."""
    return rollout(run_id, instance_id, sample, turn=index, attempt=attempt) + f"#turn-{index}"


def named(where: str) -> str:
    """The page of `RUN`, `RUN/INSTANCE` or `RUN/INSTANCE/SAMPLE`; empty for the list of runs."""
    run_id, *below = where.split("/")
    if not run_id:
        return "/"
    return "/".join((run(run_id), *(["rollouts"] if below else []), *(quote(one) for one in below)))


def _with(path: str, parameters: dict[str, object]) -> str:
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
