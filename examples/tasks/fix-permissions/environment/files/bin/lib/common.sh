log() { echo "$*"; }
