"""The one error for what was given: a folder, a prompt, a mesh."""


class InputError(ValueError):
    """What was given is not, or not wholly, something that can be run."""
