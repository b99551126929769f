"""The image of a row: its own name, or exactly the name by its publisher's rule."""

from typing import Any

import pytest

from perdure.instances.rows.image_rules import image_of
from perdure.instances.rows.row_fields import Row

NAMES: list[tuple[dict[str, Any], str | None]] = [
    (
        {"instance_id": "django__django-11049", "version": "3.0"},
        "docker.io/swebench/sweb.eval.x86_64.django_1776_django-11049:latest",
    ),
    (
        {"instance_id": "psf__requests-1", "data_source": "SWE-bench/SWE-bench_Verified"},
        "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1:latest",
    ),
    (
        {"instance_id": "Project-MONAI__MONAI-1010", "data_source": "swe-gym"},
        "docker.io/xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1010:latest",
    ),
    (
        {"instance_id": "oauthlib__oauthlib.1fd52536.combine_file__0", "data_source": "swe-smith"},
        "docker.io/swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536:latest",
    ),
    (
        {"image_name": "jyangballin/swesmith.x86_64.a_1776_b.0c", "data_source": "swe-smith"},
        "jyangballin/swesmith.x86_64.a_1776_b.0c",
    ),
    (
        {"repo_name": "orange3", "commit_hash": "2d9617bd", "data_source": "R2E-Gym"},
        "docker.io/namanjain12/orange3_final:2d9617bd",
    ),
    (
        {"docker_image": "namanjain12/orange3_final:2d9617bd"},
        "namanjain12/orange3_final:2d9617bd",
    ),
    (
        {"instance_id": "tobymao__sqlglot-1177", "data_source": "nebius/SWE-rebench"},
        "docker.io/swerebench/sweb.eval.x86_64.tobymao_1776_sqlglot-1177:latest",
    ),
    (
        {"dockerhub_tag": "nodebb.nodebb-NodeBB__NodeBB-0499", "data_source": "swe-bench-pro"},
        "docker.io/jefzda/sweap-images:nodebb.nodebb-NodeBB__NodeBB-0499",
    ),
    (
        {"org": "Gin-Gonic", "repo": "gin", "number": 4048, "data_source": "multi-swe-bench"},
        "docker.io/mswebench/gin-gonic_m_gin:pr-4048",
    ),
    (
        {"instance_id": "a__b-1", "data_source": "swe-bench-live"},
        "docker.io/starryzhang/sweb.eval.x86_64.a_1776_b-1:latest",
    ),
    ({"image_url": "swedev/scaleswe.oh.34:x"}, "swedev/scaleswe.oh.34:x"),
    ({"image": "first:1", "image_url": "second:2"}, "first:1"),
    ({"instance_id": "a__b-1"}, None),
    ({"instance_id": "thing", "data_source": "swe-smith"}, None),
]


@pytest.mark.parametrize(("fields", "name"), NAMES)
def test_image_of_a_row(fields: dict[str, Any], name: str | None) -> None:
    """The name is the one under which the dataset's publisher pushed the image."""
    assert image_of(Row(1, fields)) == name
