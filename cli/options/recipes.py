"""Recipes: files of options for models that are often trained, in ``configs/recipes``, for ``--config NAME``."""

from pathlib import Path

from common.errors import UserError, did_you_mean
from common.files import preset_files


def recipe_file(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        UserError: there is none of this name.
    """
    recipes = preset_files("recipes")
    if name not in recipes:
        raise UserError(
            f"There is no recipe {name!r}.{did_you_mean(name, recipes)} `finetune recipe` lists them."
        )
    return recipes[name]


def recipe_list() -> str:
    """Return a line for each recipe, its name and the first line of its file, and how to use one."""
    titles = {
        name: file.read_text().partition("\n")[0].strip("# ")
        for name, file in preset_files("recipes").items()
    }
    width = max(map(len, titles))
    lines = [f"{name:{width}}  {titles[name]}" for name in sorted(titles)]
    return "\n".join(
        [*lines, "", "finetune --config NAME --data chats.jsonl    # options on the command line win"]
    )
