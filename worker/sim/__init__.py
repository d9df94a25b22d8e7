"""An engine without a model: the timing and the bookkeeping of one, ids by a rule."""
