#!/bin/bash
set -e
python3 - <<'PYTHON'
import configparser
import os

settings = configparser.ConfigParser(interpolation=None)
settings.read("defaults.ini")
for name, value in os.environ.items():
    section, _, key = name.lower().removeprefix("app_").partition("__")
    if name.upper().startswith("APP_") and settings.has_option(section, key):
        settings[section][key] = value
with open("settings.ini", "w") as file:
    settings.write(file)
PYTHON
