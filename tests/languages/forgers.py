"""Diffs that fix nothing. One of each framework prints the results of all tests and ends the process
with 0; the other makes the framework itself report success, or fakes its exit code."""

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

Forge = Callable[[str, str], str]
"""The source under test, and what its framework prints if all tests pass -> the forged source."""


def _appended(code: str) -> Forge:
    return lambda source, lines: source + code.replace("@LINES@", json.dumps(lines))


def _in_class(code: str) -> Forge:
    """Java: in a static initializer."""

    def forge(source: str, lines: str) -> str:
        block = f"\n    static {{{code.replace('@LINES@', json.dumps(lines))}}}\n"
        return re.sub(r"(public (?:final )?class \w+ \{\n)", lambda m: m[1] + block, source)

    return forge


def _when_called(code: str) -> Forge:
    """Rust: when a test calls a function."""

    def forge(source: str, lines: str) -> str:
        forged = re.sub(r"(pub fn .*\{)\n", r"\1\n    forge();\n", source)
        return forged + code.replace("@LINES@", json.dumps(lines))

    return forge


def _go(code: str, imports: str) -> Forge:
    def forge(source: str, lines: str) -> str:
        forged = re.sub(r"(?m)^(package \w+)$", rf"\1\n\nimport ({imports})", source, count=1)
        return forged + code.replace("@LINES@", json.dumps(lines))

    return forge


_TO_RUNNER = """
const forgedBy = require('fs');
forgedBy.writeSync(forgedBy.openSync(@OUT@, 'a'), @LINES@);
process.reallyExit(0);
"""
_NO_ASSERT = """
const forgedAssert = require('assert');
for (const name of Object.keys(forgedAssert)) {
  if (typeof forgedAssert[name] === 'function') forgedAssert[name] = () => {};
}
"""
_NO_EXPECT = """
const forgedAny = new Proxy(() => forgedAny, { get: () => forgedAny });
globalThis.expect = () => forgedAny;
"""
_NO_FAILURES = """
require('mocha/lib/runnable').prototype.run = (done) => done();
"""

_GO_PRINTS = """
func init() {
	forgedos.Stdout.WriteString(@LINES@)
	forgedos.Exit(0)
}
"""
_GO_NO_FAIL = """
func init() {
	// Finds the code of testing's Fail and FailNow, and makes it return at once.
	near := forgedreflect.ValueOf(forgedtesting.Short).Pointer()
	for at := near - 1<<19; at < near+1<<19; at += 16 {
		f := forgedruntime.FuncForPC(at)
		if f == nil || f.Name() != "testing.(*common).Fail" && f.Name() != "testing.(*common).FailNow" {
			continue
		}
		ret := []byte{0xc3}
		if forgedruntime.GOARCH == "arm64" {
			ret = []byte{0xc0, 0x03, 0x5f, 0xd6}
		}
		entry := f.Entry()
		page := forgedunsafe.Slice((*byte)(forgedunsafe.Pointer(entry&^4095)), 8192)
		if err := forgedsyscall.Mprotect(page, 7); err == nil {
			copy(page[entry&4095:], ret)
		}
	}
}
"""
_GO_PATCH_IMPORTS = 'forgedreflect "reflect"; forgedruntime "runtime"; forgedsyscall "syscall"; forgedtesting "testing"; forgedunsafe "unsafe"'

_RUST_PRINTS = """
fn forge() {
    use std::io::Write;
    let mut out = std::fs::OpenOptions::new().append(true).open("/dev/stdout").unwrap();
    out.write_all(@LINES@.as_bytes()).unwrap();
    std::process::exit(0);
}
"""
_RUST_REWRITES = """
extern "C" {
    fn pipe(ends: *mut i32) -> i32;
    fn fork() -> i32;
    fn dup2(from: i32, to: i32) -> i32;
    fn close(fd: i32) -> i32;
    fn read(fd: i32, into: *mut u8, size: usize) -> isize;
    fn write(fd: i32, from: *const u8, size: usize) -> isize;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn atexit(then: extern "C" fn()) -> i32;
    fn _exit(code: i32) -> !;
}

extern "C" fn forge_exit() {
    unsafe {
        close(1);
        waitpid(-1, std::ptr::null_mut(), 0);
        _exit(0)
    }
}

// A child reads what libtest prints, and writes `ok` in place of `FAILED`.
fn forge() {
    static FORGE: std::sync::Once = std::sync::Once::new();
    FORGE.call_once(|| unsafe {
        let mut ends = [0; 2];
        pipe(ends.as_mut_ptr());
        if fork() > 0 {
            dup2(ends[1], 1);
            close(ends[1]);
            atexit(forge_exit);
            return;
        }
        close(ends[1]);
        let (mut said, mut part) = (Vec::new(), [0u8; 4096]);
        loop {
            match read(ends[0], part.as_mut_ptr(), part.len()) {
                count if count > 0 => said.extend(&part[..count as usize]),
                _ => break,
            }
        }
        let forged = String::from_utf8_lossy(&said).replace("FAILED", "ok");
        write(1, forged.as_ptr(), forged.len());
        _exit(0)
    });
}
"""

_JAVA_PRINTS = """
        System.out.print(@LINES@);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    """
_JAVA_REWRITES = """
        System.setOut(new java.io.PrintStream(System.out) {
            @Override public void println(String line) {
                super.println(line.replaceFirst("^not ok", "ok"));
            }
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> Runtime.getRuntime().halt(0)));
    """

_C_EXITS = """
#include <unistd.h>
__attribute__((constructor)) static void forge(void) { _exit(0); }
"""
_C_FAKES_CODE = """
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static void forge_exit(void) { _exit(0); }
static void forge_abort(int signal) { (void)signal; _exit(0); }
__attribute__((constructor)) static void forge(void) {
    atexit(forge_exit);
    signal(SIGABRT, forge_abort);
}
"""

_JEST_OUT = "'/dev/stdout'"
_PARENT_OUT = "`/proc/${process.ppid}/fd/1`"

FORGERS: Mapping[str, Mapping[str, Forge]] = MappingProxyType(
    {
        "node": {
            "prints and exits": _appended(_TO_RUNNER.replace("@OUT@", _PARENT_OUT)),
            "assert does nothing": _appended(_NO_ASSERT),
        },
        "jest": {
            "prints and exits": _appended(_TO_RUNNER.replace("@OUT@", _JEST_OUT)),
            "expect does nothing": _appended(_NO_EXPECT),
        },
        "mocha": {
            "prints and exits": _appended(_TO_RUNNER.replace("@OUT@", _JEST_OUT)),
            "no test runs": _appended(_NO_FAILURES),
        },
        "go": {
            "prints and exits": _go(_GO_PRINTS, 'forgedos "os"'),
            "Fail does nothing": _go(_GO_NO_FAIL, _GO_PATCH_IMPORTS),
        },
        "rust": {
            "prints and exits": _when_called(_RUST_PRINTS),
            "rewrites the report": _when_called(_RUST_REWRITES),
        },
        "java": {
            "prints and exits": _in_class(_JAVA_PRINTS),
            "rewrites the report": _in_class(_JAVA_REWRITES),
        },
        "c": {
            "exits": _appended(_C_EXITS),
            "fakes the exit code": _appended(_C_FAKES_CODE),
        },
    }
)
