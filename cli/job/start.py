"""What a node checks before it waits for the others."""

from cli.job.prepare import check
from cli.job.resumed import committed
from cli.job.strategy import check_strategy
from cli.options.settings import Settings
from common.errors import UserError


def check_start(settings: Settings, ranks_per_node: int) -> None:
    """Check a run on several ranks as far as this node can tell.

    Raises:
        UserError: if options name what does not exist, do not go together, or would overwrite a run.
    """
    ranks = ranks_per_node * (settings.nodes or 1)
    if settings.batch_size < ranks:
        raise UserError(
            f"--batch-size {settings.batch_size} is less than one sequence for each of {ranks} ranks "
            f"({settings.nodes} x {ranks_per_node})."
        )
    check_strategy(settings, ranks_per_node)
    checked = check(settings)
    commits, has_commit = checked.ssd[0] / checked.run_name, committed(settings) is not None
    if has_commit and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{commits} holds a run already: add --resume to continue it, --overwrite to replace it, or give "
            "another --output."
        )
    if settings.resume and not has_commit and not settings.ssd:  # with --ssd, the ranks find which node lacks what
        raise UserError(f"--resume: there is no commit in {commits}. Leave it out to begin.")
