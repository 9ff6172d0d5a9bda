// Formulas are those that pymdownx.arithmatex has marked; nothing is loaded from elsewhere.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex", enableMenu: false },
};
