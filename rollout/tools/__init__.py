"""Tools of MCP servers for the policy (docs/agents.md)."""

from rollout.tools.mcp_agent import McpAgent

__all__ = ["McpAgent"]
