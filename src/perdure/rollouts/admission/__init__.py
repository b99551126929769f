"""When a sandbox may boot: its host is alive and has a free seat, and the account grants a permit.

    rollout                          host                           account of the provider
    -------------------------------  -----------------------------  ------------------------------
    boot waits in Temporal's queue
                                     term confirmed, seat free:
                                     takes the boot
    on no account: create
    on an account: prepare, ask ----------------------------------> queued, after older ones
    waits for `granted`, and holds   the seat is free again         fewer sandboxes than its cap,
    neither seat nor slot                                           creates slower than its rate:
    <-------------------------------------------------------------- permit
    boot, in the queue again         takes a seat
    create ... is up ---------------------------------------------> a lowered limit rises
           ... 429: ask again ------------------------------------> limits fall; queued first
    the agent works                  the seat is renewed
    diff taken, sandbox killed       the seat is free
    ask for the grading's sandbox --------------------------------> the same permit, at once
    grading ends -------------------------------------------------> the next holder's permit

The run with the fewest permits is served first. A rollout that gets no answer for ten minutes asks
again. One that waits past its `expires_at` ends as expired. A grading needs no seat: `slots.grade`
limits the gradings of a worker.

- `host_seats.py`: the seats of a home (`slots.agent`). `workers/host/boot_slots.py` turns them into slots of
  the boot queue (docs/decisions/0020-seats-are-slots.md). `workers/host/README.md` says when a
  host's term is confirmed.
- `permit_rules.py`: the rules of an account. `workflows/account_workflow.py` keeps one account for all workers
  and revokes the permits of closed workflows (docs/decisions/0010-permits-of-an-account.md).
- `account_client.py`: the messages from a stage to its account.
"""
