// Formulas arrive as \(…\) or \[…\] in elements of this class; KaTeX lies beside the page.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
