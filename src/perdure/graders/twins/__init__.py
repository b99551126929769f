"""Twins: each FAIL_TO_PASS test runs twice, once as it is and once with one expectation changed.
The changed one, the twin, must fail. Code that forges results cannot know which of the two it runs
in.

- `mutate`: the changes that a test's source allows, by rules under which a test and its twin cannot
  both pass.
- `lint`: refuses twins that a reader would recognize.
- `choose`: calibration. It runs the candidates under gold and under the base.
- `draw`: for each grading, picks one twin per test and flips the host's coin. The result is two
  instances that differ from the row's only in `test_patch`.
- `combine`: turns the grades of both runs into one grade, official and verified.

Calibration calls this, after it has computed the lists:

    chosen = await choose_twins(instance, make_sandbox, wanted=5, runs=3)
    chosen.instance   # the same instance; `grading.twins` holds the proven twins
    chosen.report     # ChosenReport: for each FAIL_TO_PASS id how many twins, or why it has none

`make_sandbox` is a `perdure.instances.calibration_proof.MakeSandbox`. A test without a twin is no error.
"""
