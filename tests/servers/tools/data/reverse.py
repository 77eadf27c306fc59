from verl_tool.servers.tools.base import Tool, ToolResult


class Reverse(Tool):
    name = "reverse"
    description = "Reverses a text."
    example_actions = ("<reverse>abc</reverse>",)

    async def run(self, call, context):
        return ToolResult(call.input[::-1])
