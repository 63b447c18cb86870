"""Take an output directory for a run: locked, with the earlier run set aside, which is put back if this one fails."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from cli.job.outputs import Outputs
from cli.job.replaced import (
    are_stores_as_they_were,
    check_journal,
    has_journal,
    is_to_be_put_back,
    put_back,
    remove_replaced,
    was_set_aside_by,
)
from cli.options.run_record import DESCRIPTION, REPLACED, RUN
from cli.options.settings import Settings
from common.errors import UserError
from common.store.directories import DirectoryLock


@contextlib.contextmanager
def claim(settings: Settings, launch: str = "") -> Iterator[Outputs]:
    """Lock the output directory, and make it that of the run: the earlier run's files are set aside if it is new.

    They are put back if the run fails before :meth:`Outputs.begin`, and the earlier store is as it was.

    Args:
        settings: of the run; the directory exists.
        launch: id of the launcher. A rank that it starts again continues with what the lost one has begun.

    Raises:
        UserError: another run uses the directory, or other files are in the way (:meth:`Outputs.check`).
    """
    directory = settings.output_directory
    with DirectoryLock([directory]):
        outputs = Outputs.read(directory)
        continues = bool(settings.resume) or bool(launch and launch == outputs.launch)
        outputs.check_for(settings, resumes=continues)  # again: others may have written there until now
        if outputs.id:  # else what looks incomplete is not of a run
            outputs.remove_incomplete()
        if continues:
            outputs.id = outputs.id or uuid.uuid4().hex
            outputs.write()
            with outputs.held(settings):
                yield outputs
            return
        earlier = outputs
        outputs = Outputs(directory, uuid.uuid4().hex, launch)
        try:
            earlier.set_aside(settings, outputs.id)
            outputs.write()
            with outputs.held(settings):
                yield outputs
        except BaseException as error:
            if not outputs.has_begun:
                _undo(outputs, error)
            raise


def recover(directory: Path) -> None:
    """Put back what a killed run has set aside, if it has changed nothing else, and no run is at work.

    Raises:
        UserError: what was set aside is not known any more.
    """
    check_journal(directory)
    with contextlib.suppress(UserError), DirectoryLock([directory], patience=0):
        _put_back(directory)


def _undo(outputs: Outputs, error: BaseException) -> None:
    directory = outputs.directory
    with contextlib.suppress(OSError):  # a full drive, say: what went wrong first is what counts
        if not has_journal(directory):
            # The list is the earlier run's until this run has written its own.
            if Outputs.read(directory).id == outputs.id and not (directory / RUN / DESCRIPTION).exists():
                outputs.give_up()
            remove_replaced(directory)
        elif not _put_back(directory):
            error.add_note(f"What an earlier run has left in {directory} is in {directory / REPLACED} now.")


def _put_back(directory: Path) -> bool:
    """Put back what was set aside; return False, and change nothing, if a store has changed or the new run has steps.

    Killed at any moment, it can be done again.
    """
    if not is_to_be_put_back(directory):  # nothing was set aside yet, or it is being removed
        remove_replaced(directory)
        return True
    current = Outputs.read(directory)
    is_replaced = was_set_aside_by(directory, current.id)
    if (is_replaced and (directory / RUN / DESCRIPTION).exists()) or not are_stores_as_they_were(directory):
        return False
    current.remove_incomplete()
    if is_replaced:
        current.give_up()
    put_back(directory)
    return True
