"""Errors a user can mend. Each message says what was found, what was expected, and what to do."""


class UserError(ValueError):
    """Base of the errors that entry points print as one message, without a traceback."""


class ConfigError(UserError):
    """The configuration asks for something impossible or leaves something out."""


class DataError(UserError):
    """A file or directory does not hold what it should; names file, key, found and expected."""


class TrainingError(UserError):
    """Training cannot go on, whatever is tried next in this run."""


class VerifierError(UserError):
    """The verifier directory lacks a tensor or a config field."""
