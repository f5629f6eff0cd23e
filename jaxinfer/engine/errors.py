"""What the engine core raises that a caller may want to catch."""


class EngineDeadError(RuntimeError):
    """The engine core failed in a step and serves no more requests; the cause is chained."""
