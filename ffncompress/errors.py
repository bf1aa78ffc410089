"""Every error a user can meet, each with a sentence that names the next step.

FfncompressError            exit code 2
├── ModelError              the model: missing, unsupported, wrong one
├── TextError               the calibration or evaluation text
├── NumericsError           NaN or infinite activations
├── DoubtError              a base that does not read the text that it is judged on
├── BudgetError             a budget or a limit that cannot be met or read
├── PlanError               a plan folder or file
├── ArtifactError           an output or an emitted checkpoint
├── RecipeError             a recipe file
├── ProcessError            another process of the same run
└── HubError                an upload
"""


class FfncompressError(Exception):
    """Base of every error raised on purpose; its text is complete and is shown without a traceback.

    try:
        ffncompress.plan("gpt2", "gpt2-plan", budget="9000x")
    except ffncompress.FfncompressError as error:
        print(error)  # says what is wrong, and what to do
    """


class ModelError(FfncompressError):
    """The model is missing, of an unsupported family, or not the one that a plan was made for."""


class TextError(FfncompressError):
    """A text cannot be read, is empty, or has too few tokens."""


class NumericsError(FfncompressError):
    """A block's activations are not finite."""


class DoubtError(FfncompressError):
    """The base model does not read the text, so no limit on a change of its perplexity means anything."""


class BudgetError(FfncompressError):
    """A budget, a limit or a block selection cannot be read or cannot be met."""


class PlanError(FfncompressError):
    """A plan is missing, corrupted, empty, or of another schema."""


class ArtifactError(FfncompressError):
    """An output folder cannot be written, or an emitted checkpoint is not what it says."""


class RecipeError(FfncompressError):
    """A recipe has an unknown key or a value of the wrong type."""


class ProcessError(FfncompressError):
    """Another process of this run ended, so this one cannot go on."""

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "another process of this run ended; no output was written; look at what it said, or, if it said "
            "nothing, whether memory ran out"
        )


class HubError(FfncompressError):
    """An upload was refused, by us or by the Hub."""
