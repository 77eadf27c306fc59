#!/bin/bash
set -e
python3 - <<'PYTHON'
import io
import json
import tarfile
import zipfile

with tarfile.open("backup.tar.xz") as tar:
    for member in tar:
        with zipfile.ZipFile(io.BytesIO(tar.extractfile(member).read())) as archive:
            for name in archive.namelist():
                for line in archive.read(name).decode().splitlines():
                    number, cause, minutes = line.split()
                    if number == "INC-4471":
                        answer = {"file": name, "cause": cause[6:], "minutes": int(minutes[8:])}
json.dump(answer, open("answer.json", "w"))
PYTHON
