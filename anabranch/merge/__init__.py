"""Pure numerics on numpy arrays: no I/O, no torch, no clock.

`fragments` says which tensors travel together, `codecs` how they travel, `guards` what may enter, `weights`
and `average` what comes out of a round, `outer` what that does to the global model.
"""
