"""Commands that change the model, the system prompt, parameters and presets."""

from headrace.app.answer.phrases import sampling_in_effect
from headrace.app.tui.screens.chat_view import ChatView
from headrace.app.tui.screens.parameters import read_parameter, write_parameter
from headrace.runtime.errors import UsageError


class ModelActions:
    """Changes count from the next answer on."""

    def __init__(self, view: ChatView) -> None:
        self._view, self._state = view, view.state
        self.commands = {
            "model": self._model,
            "system": self._system,
            "set": self._set,
            "preset": self._preset,
        }

    def _model(self, name: str) -> None:
        """Switch to a model, after a question if it has to be downloaded; without a name, open the picker."""
        from headrace.app.chat.download_plan import download_plan
        from headrace.app.chat.model_names import check_model_name  # not imported at the start
        from headrace.app.tui.screens.models_screen import ModelsScreen, fetch_question

        app = self._view.screen.app
        if not name:
            app.push_screen(
                ModelsScreen(self._state),
                lambda chosen: self._view.attempt(lambda: self._model(chosen)) if chosen else None,
            )
            return
        check_model_name(name)
        if (plan := download_plan(name)) is None:
            self._use_model(name)
        else:
            app.push_screen(fetch_question(plan), lambda answer: self._use_model(name) if answer == "fetch" else None)

    def _use_model(self, name: str) -> None:
        def use() -> None:
            self._state.conversation.set_model(name)
            self._state.metrics.loading(f"loading {name}", None)

        self._view.attempt(use)

    def _system(self, text: str) -> None:
        if text:
            self._state.conversation.branch.set_system("" if text == "none" else text)
            self._state.notify("system prompt set, from the next answer on")
        else:
            self._set("")

    def _set(self, assignment: str) -> None:
        """Set `NAME VALUE`, show `NAME`, or open the parameters' screen."""
        from headrace.app.tui.screens.parameters_screen import ParametersScreen

        conversation = self._state.conversation
        name, _, value = assignment.replace("=", " ", 1).partition(" ")
        if not name:
            self._view.screen.app.push_screen(ParametersScreen(conversation, self._state.engine.card))
        elif not value.strip():
            read_parameter(name, "")  # raises for an unknown name
            shown = write_parameter(name, conversation.session.sampling)
            self._state.notify(f"{name}: {shown or 'not set'}; in effect: {sampling_in_effect(conversation.effective)}")
        else:
            conversation.branch.set_sampling({name.replace("-", "_"): read_parameter(name, value)})
            self._state.notify(f"{name}: {value.strip()}, from the next answer on")

    def _preset(self, argument: str) -> None:
        """Apply `NAME`, `save NAME` or `delete NAME`; without an argument, let the user pick."""
        from headrace.app.config.presets import Preset, delete_preset, load_presets, save_preset

        conversation, session = self._state.conversation, self._state.conversation.session
        verb, _, name = argument.partition(" ")
        if name.strip() and verb == "save":
            save_preset(name.strip(), Preset(session.system, session.sampling))
            self._state.presets_changed()
            self._state.notify(f"preset {name.strip()} saved: this session's system prompt and settings")
        elif name.strip() and verb == "delete":
            delete_preset(name.strip())
            self._state.presets_changed()
            self._state.notify(f"preset {name.strip()} deleted")
        elif not (presets := load_presets()):
            self._state.notify("there are no presets yet; /preset save NAME keeps this session's settings")
        elif not argument:
            names = list(presets)
            self._view.pick("which preset?", names, lambda number: self._preset(names[number]), always=True)
        elif argument not in presets:
            raise UsageError(f"preset {argument}: not found", "one of " + ", ".join(presets))
        else:
            conversation.branch.set_system(presets[argument].system)
            conversation.branch.set_sampling(dict.fromkeys(session.sampling) | dict(presets[argument].sampling))
            self._state.notify(f"preset {argument} applied, from the next answer on")
