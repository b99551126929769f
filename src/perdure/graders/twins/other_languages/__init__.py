"""Twins of hidden tests in JavaScript, TypeScript, Go, Rust, Java and C.

- `languages`: for each language its grammar, its literals and its forms of expectations.
- `parsed_file`: a test file as tree-sitter reads it: its tests, and places of their parts.
- `expectations`: the comparisons of a test that run whatever the code under test returns.
- `go_tables`: the rows of Go's table tests and their subtests.
- `twin_pools`: twins of each test function that an id names.

The rules are those of `expectation_mutation`: a test and its twin cannot both pass.
"""
