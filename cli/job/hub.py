"""A hub to which a model is to be pushed: whether that can be done, before anything is trained."""

from cli.options.settings import Settings
from common.errors import UserError, on_one_line
from common.hub import is_hub_name


def check_push(settings: Settings) -> None:
    """See whether ``--push-to-hub`` can be done when training has ended.

    Raises:
        UserError: it cannot.
    """
    name = settings.push_to_hub
    if name is None:
        return
    if not settings.save:
        raise UserError(f"--push-to-hub {name} pushes what is exported, and --no-save exports nothing: leave one out.")
    if not is_hub_name(name):
        raise UserError(f"--push-to-hub {name} is not the name of a repository: give owner/name.")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push-to-hub {name} needs a token that may write there, and there is none: run `hf auth login`, or set "
            "HF_TOKEN."
        )
    try:
        huggingface_hub.HfApi().whoami()
    except Exception as error:  # the hub's, the network's and the library's own errors
        raise UserError(
            f"--push-to-hub {name}: the hub does not take the token ({type(error).__name__}: {on_one_line(error)}). "
            "Run `hf auth login`, or leave it out, and push later."
        ) from error
