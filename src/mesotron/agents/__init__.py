"""`mesotron mcp`: the package's tools for an agent, over the Model Context Protocol."""
