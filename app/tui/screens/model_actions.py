"""Commands that change the model, the system prompt, parameters and presets."""

from headrace.app.chat.command_actions import preset_names, set_parameter, set_schema, set_system, use_preset
from headrace.app.tui.screens.chat_view import ChatView


class ModelActions:
    """Changes count from the next answer on."""

    def __init__(self, view: ChatView) -> None:
        self._view, self._state = view, view.state
        self.commands = {
            "model": self._model,
            "system": self._system,
            "set": self._set,
            "schema": lambda text: self._state.notify(set_schema(self._state.conversation, text)),
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
            self._state.use_model(name)
            return

        def answered(answer: str | None) -> None:
            if answer == "fetch":
                self._view.attempt(lambda: self._state.fetch_and_use(name))

        app.push_screen(fetch_question(plan), answered)

    def _system(self, text: str) -> None:
        if text:
            self._state.notify(set_system(self._state.conversation, text))
        else:
            self._edit_parameters("system")

    def _set(self, assignment: str) -> None:
        """Set `NAME VALUE`, show `NAME`, or open the parameters' screen."""
        if assignment:
            self._state.notify(set_parameter(self._state.conversation, assignment))
        else:
            self._edit_parameters("filter")

    def _edit_parameters(self, begin_at: str) -> None:
        from headrace.app.tui.screens.parameters_screen import ParametersScreen

        screen = ParametersScreen(self._state.conversation, self._state.engine.card, begin_at=begin_at)
        self._view.screen.app.push_screen(screen)

    def _preset(self, argument: str) -> None:
        """Apply `NAME`, `save NAME` or `delete NAME`; without an argument, let the user pick."""
        if argument:
            self._state.notify(use_preset(self._state.conversation, argument))
            self._state.presets_changed()
        elif not (names := preset_names()):
            self._state.notify("there are no presets yet; /preset save NAME keeps this session's settings")
        else:
            self._view.pick("which preset?", names, lambda number: self._preset(names[number]), always=True)
