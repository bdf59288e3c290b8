"""Bessemer for coding assistants: the MCP server (`bessemer mcp`) and the files of `bessemer assist install`."""
