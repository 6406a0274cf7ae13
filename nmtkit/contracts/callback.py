"""Checks of a callback: its hooks, its state, and short runs."""

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import resume_is_exact
from nmtkit.models.architectures.contract import ContractError, described
from nmtkit.training.callbacks import CALLBACKS, Callback, hook_mistakes


def every_hook_has_a_name_that_a_run_calls(subject: Subject[Callback]) -> None:
    mistakes = hook_mistakes(subject.build())
    require(not mistakes, "; ".join(mistakes))


def a_state_is_a_dict_that_is_loaded_again(subject: Subject[Callback]) -> None:
    state: object = subject.build().state()
    if not isinstance(state, dict):
        raise ContractError(f"state returned {described(state)}; it must return a dict ({{}} without state)")
    other = subject.build()
    other.load_state(state)
    again = other.state()
    require(again.keys() == state.keys(), f"after load_state, state has the keys {sorted(again)}, not {sorted(state)}")


check_callback = Contract(CALLBACKS, Callback, checks_of(__name__, resume_is_exact))
