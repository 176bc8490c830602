"""Errors that a user of the engine or the command line can act on."""


class UsageError(ValueError):
    """Options that do not make sense, alone or together; the message says what to change."""


class NumericsError(ValueError):
    """Logits that are not finite: damaged weights, or an overflow of the dtype."""


class ContextLengthError(ValueError):
    """A prompt that does not fit the model's context."""
