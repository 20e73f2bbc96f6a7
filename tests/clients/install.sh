#!/usr/bin/env bash
# Installs agents and client libraries, from npm and PyPI, in .cache/clients for tests/clients. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/../.."
to=.cache/clients
install() { # <environment> <package>...
  [ -x "$to/$1/bin/pip" ] || "${PYTHON:-python3.11}" -m venv "$to/$1"
  "$to/$1/bin/pip" --disable-pip-version-check --quiet install "${@:2}"
}
install python langchain==1.5.2 langchain-openai==1.7.4 openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0'
install litellm 'litellm[proxy]==1.108.5'
# TRL runs on the PyTorch and vLLM of .venv.
"$to/python/bin/pip" --disable-pip-version-check --quiet install --upgrade --no-deps --target "$to/trl" \
  trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 multiprocess==0.70.19 xxhash==4.1.0
command -v npm > /dev/null || { echo "make clients: npm is missing, so Claude Code, Codex, OpenCode, the AI SDK and MCP's harness are skipped" >&2; exit 0; }
npm install --prefix "$to" --no-audit --no-fund --loglevel error \
  node@22 @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33 ai@7.0.173 @ai-sdk/openai@4.0.118 zod@4.6.7 \
  @modelcontextprotocol/conformance@0.2.0-alpha.12
