"""One engine over several processes: they share messages and take the same steps. And two engines in processes of
their own, one of which computes prompts for the other: `prefill_server`, `remote_prefill`.

Imported by `_engine.frontend`. A new kind of call goes into `LockstepCores`, its words into `Channel`'s messages.
"""
