"""The application for ``serve build``, which takes no builder: it writes a config file to be edited.

serve build --app-dir examples/serve tool_server:app -o my_tools.yaml
"""

from verl_tool.servers.serve.builder import ToolServerArgs, tool_server

app = tool_server(ToolServerArgs(tool_type="python_code,calculator", workers_per_tool=1))
