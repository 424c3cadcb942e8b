"""The page's colours and fonts: greys, one accent colour, and system fonts, so that none is downloaded."""

import gradio as gr


def theme() -> gr.themes.Base:
    """The theme for Gradio's `launch`."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.indigo,
        neutral_hue=gr.themes.colors.slate,
        text_size=gr.themes.sizes.text_sm,
        spacing_size=gr.themes.sizes.spacing_sm,
        radius_size=gr.themes.sizes.radius_md,
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SF Mono", "Menlo", "Consolas", "monospace"],
    ).set(
        button_secondary_background_fill="*background_fill_primary",
        button_secondary_background_fill_dark="*background_fill_primary",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_hover_dark="*neutral_800",
        button_secondary_border_color="*border_color_primary",
        button_secondary_border_color_dark="*border_color_primary",
        button_border_width="1px",
        button_large_text_size="*text_md",
        button_large_text_weight="500",
        button_large_padding="*spacing_md *spacing_xl",
        button_small_text_size="*text_md",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_text_color="white",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
    )
