"""Runs some scripts of this folder in one process, and prints END between what they print.

python run_scripts.py '[["script.py", "argument", ...], ...]'
"""

import json
import pathlib
import runpy
import sys

if __name__ == "__main__":
    for number, (script, *arguments) in enumerate(json.loads(sys.argv[1])):
        if number:
            print("END", flush=True)
        sys.argv = [script, *arguments]
        runpy.run_path(str(pathlib.Path(__file__).with_name(script)), run_name="__main__")
