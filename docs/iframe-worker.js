// A page that is opened from a disk may start no worker, and search runs in one. There a hidden frame does its work.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    static all = [];

    static enter(frame, number) {
      const worker = IFrameWorker.all[number];
      frame.postMessage = (data) => worker.dispatchEvent(new MessageEvent("message", { data }));
      frame.importScripts = async (...addresses) => {
        for (const address of addresses) {
          await new Promise((resolve, reject) => {
            const script = frame.document.createElement("script");
            Object.assign(script, { src: address, onload: resolve, onerror: reject });
            frame.document.head.append(script);
          });
        }
      };
    }

    constructor(address) {
      super();
      const number = IFrameWorker.all.push(this) - 1;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        `<script>parent.IFrameWorker.enter(window, ${number})<` +
        `/script><script src="${new URL(address, location.href)}"><` + "/script>";
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
    }

    async postMessage(data) {
      await this.ready;
      const frame = this.frame.contentWindow;
      frame.dispatchEvent(new frame.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
