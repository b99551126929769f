"""Renders the test files of `rows/js.txt` for node's runner, jest and mocha.

`a IS b` compares identities, `a EQUALS b` compares contents. `TESTING chai` asks for chai in mocha.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Runner = Literal["node", "jest", "mocha"]

_ASSERT = "const assert = require('node:assert');\n"
_HEADS: Mapping[str, str] = MappingProxyType(
    {
        "node": "const { describe, test } = require('node:test');\n" + _ASSERT,
        "jest": "",
        "mocha": _ASSERT,
        "chai": "const { expect } = require('chai');\n",
    }
)
_STYLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "node": (r"assert.strictEqual(\1, \2);", r"assert.deepStrictEqual(\1, \2);"),
        "jest": (r"expect(\1).toBe(\2);", r"expect(\1).toEqual(\2);"),
        "mocha": (r"assert.strictEqual(\1, \2);", r"assert.deepStrictEqual(\1, \2);"),
        "chai": (r"expect(\1).to.equal(\2);", r"expect(\1).to.deep.equal(\2);"),
    }
)


def rendered(text: str, runner: Runner) -> str:
    chai = runner == "mocha" and "TESTING chai\n" in text
    style = "chai" if chai else runner
    same, alike = _STYLES[style]
    text = re.sub(r"TESTING.*\n", _HEADS[style], text)
    text = re.sub(r"(\S.*) IS (.*)", same, text)
    text = re.sub(r"(\S.*) EQUALS (.*)", alike, text)
    return re.sub(r"\btest\(", "it(", text) if runner == "mocha" else text
