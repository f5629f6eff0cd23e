"""What the engine core raises that a caller may want to catch."""


class EngineDeadError(RuntimeError):
    """The engine core failed in a step and serves no more requests; the cause is chained."""


class WrongRunner(ValueError):
    """An engine that writes tokens was asked for vectors, or the other way round."""
