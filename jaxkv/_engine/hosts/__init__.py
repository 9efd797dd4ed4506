"""One engine over several processes: they share messages and take the same steps.

Imported by `_engine.frontend`. A new kind of call goes into `LockstepCores`, its words into `Channel`'s messages.
"""
