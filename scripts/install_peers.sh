#!/usr/bin/env bash
# Install other systems that the tests play with, each in an environment of its own: bash scripts/install_peers.sh [FOLDER [NAME...]]
# (default: .peers, all). VERL_TOOL_PEERS=FOLDER lets the tests find them; each is run as FOLDER/NAME/bin/python.
set -euo pipefail
folder="${1:-.peers}"
shift || true
chosen=" $* "
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
is_chosen() { [ "$chosen" = "  " ] || [[ "$chosen" == *" $1 "* ]]; }
install_python() { # PYTHON NAME PACKAGE...
    local python="$1" name="$2"
    shift 2
    [ -x "$folder/$name/bin/pip" ] || "$python" -m venv "$folder/$name"
    "$folder/$name/bin/pip" install --quiet "$@"
}
new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < ($2))" 2>/dev/null; }
# The Python of Debian unstable, in a file system of its own, for packages that need a newer one than is here.
install_in_chroot() { # NAME PACKAGE...
    local root="$folder/debian" name="$1"
    shift
    if [ ! -x "$root/usr/bin/python3" ]; then
        if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
            echo "$name is left out: it needs a newer Python, or root and debootstrap" >&2
            return
        fi
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates sid "$root"
        cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
        cp /etc/resolv.conf "$root/etc/resolv.conf"
    fi
    [ -x "$root/opt/$name/bin/pip" ] || chroot "$root" python3 -m venv "/opt/$name"
    chroot "$root" "/opt/$name/bin/pip" install --quiet "$@"
    mkdir -p "$folder/$name/bin"
    printf '#!/bin/sh\nexec chroot "%s" "/opt/%s/bin/python" "$@"\n' "$root" "$name" >"$folder/$name/bin/python"
    chmod +x "$folder/$name/bin/python"
}
if is_chosen openenv; then
    install_python python3 openenv openenv==0.10.0 smolagents==1.26.0
fi
if is_chosen bfcl; then
    install_python python3 bfcl --no-deps bfcl-eval==2026.3.23 numpy==1.26.4 mpmath==1.3.0
fi
if is_chosen openreward; then
    install_python python3 openreward openreward==0.1.167
fi
if is_chosen verifiers; then
    install_python python3 verifiers verifiers==0.4.0
fi
if is_chosen inspect; then
    install_python python3 inspect inspect-ai==0.3.285 openai==3.57.0
fi
for peer in gem:gem-llm==0.1.0 textarena:textarena==0.7.4 skyrl_gym:skyrl-gym==0.4.0 textworld:textworld==1.7.0 gymnasium:gymnasium==1.4.0; do
    if is_chosen "${peer%%:*}"; then install_python python3 "${peer%%:*}" "${peer#*:}"; fi
done
if is_chosen nemo_gym; then
    python="$(command -v python3.14 || command -v python3.13 || echo python3)"
    if new_enough "$python" "3, 13, 14"; then
        install_python "$python" nemo_gym nemo-gym==0.7.0
    else
        install_in_chroot nemo_gym nemo-gym==0.7.0
    fi
fi
echo "peers in $folder"
