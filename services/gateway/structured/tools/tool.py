"""The tools that a request offers to the model, independent of dialects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_TOOLS = 256


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a custom tool: any text, or text that matches `definition`."""

    syntax: Literal["text", "lark", "regex"] = "text"
    definition: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. `parameters` is a JSON Schema of the arguments. `custom` is set if the input is text;
    the model then sees a function with one string, `input`. `param` and `schema_param` are the
    request fields of the tool and of its schema or definition, such as `tools[2].input_schema`, for
    errors.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    is_strict: bool = False
    custom: CustomFormat | None = None
    param: str = "tools"
    schema_param: str = "tools"


def template_tool(tool: Tool) -> dict[str, Any]:
    """Returns the tool in the form for chat templates: with all keys, which some read without a
    check.
    """
    description = tool.description
    if tool.custom is not None and tool.custom.definition:
        kind = "regular expression" if tool.custom.syntax == "regex" else "Lark grammar"
        rule = f"`input` matches this {kind}:\n{tool.custom.definition}"
        description = f"{description}\n\n{rule}" if description else rule
    parameters = tool.parameters
    if "properties" not in parameters:
        parameters = {"type": "object", "properties": {}, **parameters}
    function = {"name": tool.name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class NamedTool(msgspec.Struct, frozen=True):
    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class ToolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request. `tools` are those that may be called, at least one. `offered` are
    those that the model is shown, if they are more. `is_parallel` allows several calls in one
    answer.
    """

    tools: tuple[Tool, ...]
    offered: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice not in ("auto", "none")

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called under `choice`."""
        if self.choice == "none":
            return ()
        if isinstance(self.choice, NamedTool):
            name = self.choice.name
            return tuple(each for each in self.tools if each.name == name)
        return self.tools

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the chat template shows."""
        return () if self.choice == "none" else self.offered or self.tools
