"""The model of one process: building, stepping, memory layout and storage.

`step` builds model and optimizers and trains batches (their size: `batch_size`), `evaluation` evaluates. `layout` says
what of the model rounds average; it leaves out values that others share (`storage`). `checkpoint` writes and reads
checkpoints, by `tensors`; `state` is the trained model for users. `savable`, `trial` and `optimizer_state` find early
what could not be trained, saved or resumed.
"""
