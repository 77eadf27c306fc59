"""Checks of a live server from the command line, one module a tool.

python -m verl_tool.servers.tests.test_python_code_tool python --url=http://localhost:5000/get_observation
"""
