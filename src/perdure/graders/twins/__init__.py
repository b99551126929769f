"""Twins: each FAIL_TO_PASS test runs as it is, and once more with one expectation changed. The
changed one, the twin, must fail. Code that forges results cannot know which of the two it runs in.

- `expectation_mutation`: the changes that a test's source allows, by rules under which a test and
  its twin cannot both pass.
- `twin_lint`, `plausibility_judge`: refuse or mark twins that a reader would recognize.
- `twin_selection`: calibration. It runs copies of Python tests with the candidates, under gold and
  under the base. `selection_in_place` runs candidates of other tests one by one.
- `draw_proof`, `canary_proof`: calibration proves what gradings will run.
- `other_languages`: tests in JavaScript, TypeScript, Go, Rust, Java and C.
- `honest_variants`: other ways to write gold. A twin that passes under one of them is dropped.
- `twin_draw`: the runs of a grading: one of originals only, the others with twins. They are
  instances that differ from the row's only in `test_patch`.
- `paired_runs`, `twin_verdict`: start the runs, and turn their grades into one grade, official and
  verified.

Calibration calls this, after it has computed the lists:

    chosen = await choose_twins(instance, make_sandbox, wanted=5, runs=3)
    chosen.instance   # the same instance; `grading.twin_draws` holds the proven twins
    chosen.report     # ChosenReport: for each FAIL_TO_PASS id how many twins, or why it has none

`make_sandbox` is a `perdure.instances.calibration_proof.MakeSandbox`. A test without a twin is no error.
"""
