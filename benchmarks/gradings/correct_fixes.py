"""Correct fixes for three rows of first-steps, written without looking at the gold patches.

Each fix edits one file of the base: old text -> new text.
"""

from typing import NamedTuple


class Fix(NamedTuple):
    path: str
    old: str
    new: str


_W, _J, _H = "pathspec/gitignore.py", "jwt/api_jwt.py", "h11/_abnf.py"
_READER = "h11/_readers.py"

_IF = "\t\t\t\t\tif priority >= out_priority:\n"
_ONE = "\t\t\t\t\t\tpriority = 1\n"
_BEFORE = "\t\t\t\t\tif dir_mark:\n"

PATHSPEC = (
    Fix(_W, _IF, "\t\t\t\t\tif (pattern.include and dir_mark) or priority >= out_priority:\n"),
    Fix(_W, _ONE, _ONE + "\t\t\t\t\t\tif pattern.include:\n\t\t\t\t\t\t\tout_priority = priority\n"),
    Fix(_W, _ONE, _ONE + "\t\t\t\t\t\tout_priority = min(out_priority, 1) if pattern.include else out_priority\n"),
    Fix(_W, _BEFORE, "\t\t\t\t\tif dir_mark and pattern.include:\n\t\t\t\t\t\tout_matched, out_priority = True, 1\n\t\t\t\t\t\tcontinue\n\n" + _BEFORE),
    Fix(_W, _IF, "\t\t\t\t\toverrides = bool(dir_mark) and pattern.include\n\t\t\t\t\tif overrides or not priority < out_priority:\n"),
    Fix(_W, _IF, "\t\t\t\t\tlowest = 0 if dir_mark and pattern.include else out_priority\n\t\t\t\t\tif priority >= lowest:\n"),
    Fix(_W, _IF, "\t\t\t\t\tis_weaker = priority < out_priority\n\t\t\t\t\tif is_weaker and not (dir_mark and pattern.include is True):\n\t\t\t\t\t\tpass\n\t\t\t\t\telse:\n"),
)  # fmt: skip

_ISS = """        if isinstance(issuer, Sequence):
            if payload["iss"] not in issuer:
                raise InvalidIssuerError("Invalid issuer")
        else:
            if payload["iss"] != issuer:
                raise InvalidIssuerError("Invalid issuer")
"""
_RAISE = '            raise InvalidIssuerError("Invalid issuer")\n'

PYJWT = (
    Fix(_J, _ISS, '        allowed = [issuer] if isinstance(issuer, str) else issuer\n        if payload["iss"] not in allowed:\n' + _RAISE),
    Fix(_J, _ISS, '        if isinstance(issuer, str):\n            good = payload["iss"] == issuer\n        else:\n            good = payload["iss"] in issuer\n        if not good:\n' + _RAISE),
    Fix(_J, "isinstance(issuer, Sequence):\n            if payload", "isinstance(issuer, (list, tuple, set, frozenset)):\n            if payload"),
    Fix(_J, "if isinstance(issuer, Sequence):\n            if payload", "if isinstance(issuer, Sequence) and not isinstance(issuer, str):\n            if payload"),
    Fix(_J, _ISS, '        known = {issuer} if isinstance(issuer, str) else set(issuer)\n        if payload["iss"] not in known:\n            raise InvalidIssuerError(f"Invalid issuer: {payload[\'iss\']!r}")\n'),
    Fix(_J, _ISS, '        names = (issuer,) if isinstance(issuer, str) else tuple(issuer)\n        if not any(payload["iss"] == name for name in names):\n' + _RAISE),
    Fix(_J, _ISS, '        class PartialIssuerError(InvalidIssuerError):\n            """The issuer is a part of the expected one."""\n\n        if isinstance(issuer, str) and payload["iss"] != issuer:\n            raise PartialIssuerError("Invalid issuer")\n        if not isinstance(issuer, str) and payload["iss"] not in issuer:\n' + _RAISE),
)  # fmt: skip

_END = '    r"\\r\\n".format(**globals())\n'
_EXT = '    r"(?P<chunk_ext>{chunk_ext})?"\n'
_SIZE = '    r"(?P<chunk_size>{chunk_size})"\n    r"(?P<chunk_ext>'
_LINE = "            matches = validate(\n                chunk_header_re,\n                chunk_header,\n"

H11 = (
    Fix(_H, _EXT + _END, _EXT + '    r"[ \\t]*"\n' + _END),
    Fix(_H, _EXT, '    r"(?P<chunk_ext>[ \\t]*(?:{chunk_ext})?)"\n'),
    Fix(_H, _SIZE, '    r"(?P<chunk_size>{chunk_size})[\\t ]*"\n    r"(?P<chunk_ext>'),
    Fix(_H, 'chunk_ext = r";.*"', 'chunk_ext = r"[ \\t]*(?:;.*)?"'),
    Fix(_READER, _LINE, '            chunk_header = bytes(chunk_header).rstrip() + b"\\r\\n"\n' + _LINE),
    Fix(_READER, _LINE, '            chunk_header = re.sub(rb"[ \\t]+\\r\\n$", b"\\r\\n", bytes(chunk_header))\n' + _LINE),
    Fix(_READER, _LINE, '            chunk_header = bytes(chunk_header).strip() + b"\\r\\n"\n' + _LINE),
)  # fmt: skip

FIXES = {"pathspec-0.11.1": PATHSPEC, "pyjwt-2.10.1": PYJWT, "h11-0.14.0": H11}
"""Maps a row of first-steps to its fixes."""

MODULES = {"pathspec-0.11.1": _W, "pyjwt-2.10.1": _J, "h11-0.14.0": _H}
"""Maps a row to the module that a forger is appended to."""
