"""``python -m verl_tool.doctor.gpu_smoke``; see `smoke_cli`."""

from verl_tool.doctor.gpu_smoke.smoke_cli import main

if __name__ == "__main__":
    main()
