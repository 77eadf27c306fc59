"""``python -m verl_tool.servers.tests.test_finish_tool finish --url=http://localhost:5000/get_observation``"""

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, command_line, examples, one_by_one

_TALK = ("I am finished.", "<finisher>1</finisher>", "<result><finish>1</finish></result>")

CASES = (
    examples(name="every example action of GET /tools ends the trajectory", done=True),
    LiveCase("talk of finishing does not", one_by_one(*(LiveTurn(text, valid=False) for text in _TALK))),
    LiveCase(
        "a repeated step is answered alike",
        one_by_one([LiveTurn("<finish>1</finish>", done=True, step=0)] * 2),
        holds=lambda answers: answers[0] == answers[1],
    ),
    LiveCase("finish=true from the trainer, twice", one_by_one([LiveTurn("", valid=None, finish=True)] * 2)),
)

app = command_line(__name__, "finish", "finish", CASES)
