#!/usr/bin/env bash
# Start a tool server and a model behind an OpenAI API: the options of `python -m eval_service.app`, for example
#   bash eval_service/scripts/start_api_service.sh --from_run outputs/calculator/grpo
#   bash eval_service/scripts/start_api_service.sh --model MODEL --tool_type python_code --action_stop_tokens '</python>'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/env.sh train
exec python -m eval_service.app "$@"
