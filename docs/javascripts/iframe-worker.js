// Lets the search run in pages that are opened from disk, where browsers refuse to start a worker: the worker's script
// runs in a hidden frame instead. A page from a server keeps the browser's own Worker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.scope.document.createElement("script")
      this.ready = new Promise((loaded, failed) => Object.assign(script, { onload: loaded, onerror: failed }))
      script.src = url
      this.scope.document.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.scope.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
