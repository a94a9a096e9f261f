"""Prints what elche with some extras needs, so that an image's big layer does not change with elche's source."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(
    *project["dependencies"],
    *(one for extra in sys.argv[1:] for one in project["optional-dependencies"][extra]),
    sep="\n",
)
